"""What sampling costs in a round, and how often drafts are accepted, by drafter and sampling method.

    python benchmarks/sampling.py --dataset question.jsonl --batch-size 8 --temperature 0.8 --top-p 0.95

Arms take turns within each repeat; shares of a round's time are medians over the repeats. `sample` is everything
between the target's logits and the tokens: processors, filters, noise, verification. The draft models are noisy
copies of the target, which cost as much as it does, so only their acceptance tells something. Without `--top-p`
and the other filters, noise is drawn for the whole vocabulary. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from batchspec import LLM, SamplingParams, bundled_model
from batchspec.models.noise import noisy_copy
from batchspec.prompts import load_prompts

METHODS = ("coupled", "rejection")


def main() -> None:
    args = parse_arguments()
    arms = make_arms(args)
    prompts = load_prompts(args.dataset, arms["none"], args.num_prompts, args.max_prompt_tokens)
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        max_tokens=args.max_tokens,
        ignore_eos=True,
    )
    for llm in arms.values():
        llm.generate(prompts[: args.batch_size], SamplingParams(max_tokens=4), use_tqdm=False)
    runs: dict[str, list[dict]] = defaultdict(list)
    for _ in range(args.repeats):
        for name, llm in arms.items():
            runs[name].append(measure(llm, prompts, params))
    print_table(runs, args)
    arguments = {name: str(value) for name, value in vars(args).items()}
    print(json.dumps({"arguments": arguments, "threads": torch.get_num_threads(), "runs": runs}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the target; by default SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", required=True, type=Path, help="JSONL with `category` and `turns`")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--noise", default="0.04,0.145", help="scales of the noisy copies")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def make_arms(args: argparse.Namespace) -> dict[str, LLM]:
    none = LLM(args.model or bundled_model(), dtype=args.dtype, max_num_seqs=args.batch_size)
    arms = {"none": none}
    drafters: dict[str, dict] = {"ngram": {"method": "ngram"}}
    for scale in filter(None, args.noise.split(",")):
        drafters[f"noisy copy {scale}"] = {
            "method": "draft_model",
            "model": noisy_copy(none.model, float(scale)),
        }
    for name, config in drafters.items():
        for method in METHODS:
            arms[f"{name}, {method}"] = LLM(
                none.model,
                tokenizer=none.tokenizer,
                max_num_seqs=args.batch_size,
                speculative_config=config
                | {"num_speculative_tokens": args.num_speculative_tokens, "sampling_method": method},
            )
    return arms


def measure(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict:
    timer = llm.engine.timer
    llm.engine.reset_stats()
    timer.start()
    llm.generate(prompts, params, use_tqdm=False)
    timer.stop()
    stats = llm.engine.stats
    rounds = sum(seconds for stage, seconds in timer.seconds.items() if not stage.startswith("prefill"))
    return {
        "share_of_sample": timer.seconds["sample"] / rounds,
        "share_of_draft": timer.seconds["draft"] / rounds,
        "milliseconds_per_round": 1000 * rounds / stats.num_steps,
        "tokens_per_second_of_rounds": stats.num_output_tokens / rounds,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_steps": stats.num_steps,
    }


def print_table(runs: dict[str, list[dict]], args: argparse.Namespace) -> None:
    table = Table(title=f"batch {args.batch_size}, {args.num_prompts} prompts, {args.max_tokens} tokens each")
    for column in ("drafter, method", "ms/round", "sample", "draft", "tokens/s", "accepted", "tokens/draft"):
        table.add_column(column, justify="left" if column.startswith("drafter") else "right")
    for name, repeats in runs.items():
        median = {key: statistics.median(run[key] for run in repeats) for key in repeats[0]}
        accepted = f"{median['acceptance_rate']:.1%}" if median["num_draft_tokens"] else ""
        table.add_row(
            name,
            f"{median['milliseconds_per_round']:.0f}",
            f"{median['share_of_sample']:.1%}",
            f"{median['share_of_draft']:.1%}",
            f"{median['tokens_per_second_of_rounds']:.1f}",
            accepted,
            f"{median['mean_acceptance_length']:.2f}" if accepted else "",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
