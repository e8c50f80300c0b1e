"""Time batchspec against `transformers.generate`: same prompts, batch, dtype and token counts, interleaved.

    python benchmarks/against_transformers.py --dataset question.jsonl --batch-sizes 1,16,32

Every method gives exactly `--max-tokens` tokens per prompt (end tokens are ignored), so that all are paid for the
same work. Methods take turns within each repeat; the table shows medians and the ratio to transformers, taken
repeat by repeat. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchspec import LLM, SamplingParams, __version__
from batchspec.models.loader import bundled_model, hide_progress_bars, model_folder
from batchspec.models.prepacking import prepacked_copy

METHODS = ("transformers", "none", "ngram")
as_loaded_by_llm = cache(prepacked_copy)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    hide_progress_bars()
    args.model = args.model or model_folder(bundled_model())
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    prompts = load_prompts(args.dataset, tokenizer, args.per_category, args.max_prompt_tokens)
    report = [
        measure(model, tokenizer, prompts, batch_size, args)
        for batch_size in map(int, args.batch_sizes.split(","))
    ]
    print_table(report)
    print(json.dumps({"arguments": vars(args), "machine": machine(), "results": report}, default=str))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the target; by default the demo's SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", required=True, type=Path, help="JSONL with `category` and `turns`")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-sizes", default="1,16,32")
    parser.add_argument("--per-category", type=int, default=2, help="prompts of each category")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer prompts are left out")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--prompt-lookup-min", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--numerics", default="invariant")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def load_prompts(path: Path, tokenizer, per_category: int, max_tokens: int) -> list[list[int]]:
    """The first turn of the first prompts of each category, in the chat template."""
    taken: dict[str, int] = defaultdict(int)
    prompts = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        messages = [{"role": "user", "content": row["turns"][0]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if taken[row["category"]] < per_category and len(ids) <= max_tokens:
            taken[row["category"]] += 1
            prompts.append(ids)
    return prompts


def measure(model, tokenizer, prompts: list[list[int]], batch_size: int, args: argparse.Namespace) -> dict:
    """Run all prompts in batches of `batch_size`, each method in turn, `repeats` times after a warm-up."""
    prompts = prompts[: len(prompts) // batch_size * batch_size] if len(prompts) >= batch_size else prompts
    batches = [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    runs = {name: make_method(name, model, tokenizer, batch_size, args) for name in args.methods.split(",")}
    for run in runs.values():
        run(batches[0][:1] if batch_size == 1 else batches[0], 8)
    seconds: dict[str, list[float]] = defaultdict(list)
    answers = {}
    for _ in range(args.repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            answers[name] = [answer for batch in batches for answer in run(batch, args.max_tokens)]
            seconds[name].append(time.perf_counter() - start)
    num_tokens = len(prompts) * args.max_tokens
    return {
        "batch_size": batch_size,
        "num_prompts": len(prompts),
        "num_tokens": num_tokens,
        "methods": {
            name: {
                "seconds": times,
                "tokens_per_second": num_tokens / statistics.median(times),
                "speedup": statistics.median(
                    ours / own for ours, own in zip(seconds["transformers"], times, strict=True)
                )
                if "transformers" in seconds
                else None,
                "identical_to_none": sum(a == b for a, b in zip(answers[name], answers["none"], strict=True))
                if "none" in answers
                else None,
            }
            for name, times in seconds.items()
        },
    }


def make_method(
    name: str, model, tokenizer, batch_size: int, args: argparse.Namespace
) -> Callable[[list[list[int]], int], list[list[int]]]:
    """A function from a batch of prompts and a token count to the output tokens."""
    if name == "transformers":
        return lambda batch, num_tokens: transformers_generate(model, tokenizer, batch, num_tokens)
    config = {
        "method": name,
        "num_speculative_tokens": args.num_speculative_tokens,
        "prompt_lookup_min": args.prompt_lookup_min,
    }
    llm = LLM(
        as_loaded_by_llm(model),
        tokenizer=tokenizer,
        speculative_config=config if name != "none" else None,
        max_num_seqs=batch_size,
        numerics=args.numerics,
    )

    def run(batch: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(batch, params, use_tqdm=False)]

    return run


def transformers_generate(model, tokenizer, batch: list[list[int]], num_tokens: int) -> list[list[int]]:
    inputs = tokenizer.pad({"input_ids": batch}, return_tensors="pt")
    output = model.generate(
        **inputs,
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    return output[:, inputs["input_ids"].shape[1] :].tolist()


def print_table(report: list[dict]) -> None:
    table = Table(title="Output tokens per second (ratio to transformers.generate)")
    names = list(report[0]["methods"])
    for column in ("batch", "prompts", *names, "identical to none"):
        table.add_column(column, justify="right")
    for row in report:
        cells = [
            f"{m['tokens_per_second']:.1f}" + (f" ({m['speedup']:.2f}x)" if m["speedup"] else "")
            for m in row["methods"].values()
        ]
        same = ", ".join(f"{name} {m['identical_to_none']}" for name, m in row["methods"].items())
        table.add_row(str(row["batch_size"]), str(row["num_prompts"]), *cells, same)
    Console(width=140).print(table)


def machine() -> dict:
    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "batchspec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
