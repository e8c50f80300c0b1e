#!/usr/bin/env bash
# Makes the drafter that batchspec brings (src/batchspec/data/smollm2-135m-drafter) from SmolLM2-135M-Instruct alone,
# which draws the users' words, too. May be stopped and started again. About four hours on two cores.
#
#   benchmarks/bundled_drafter.sh FOLDER
set -euo pipefail
work=${1:?a folder to work in}
common=(--kind feature --layers 1 --dtype bfloat16 --max-tokens 160 --shard-size 384 --max-num-seqs 192)

# 13 shards of 384 answers, of two seeds, made side by side. A run is ended when its shards are there.
make_shards() { # folder, seed, number of shards
  local last
  last=$(printf '%s/%s/training/data/%05d.safetensors' "$work" "$1" $(($3 - 1)))
  [ -f "$last" ] && return
  OMP_NUM_THREADS=1 batchspec train-drafter --out "$work/$1" --seed "$2" --minutes 9999 --data-minutes 9998 "${common[@]}" &
  while [ ! -f "$last" ]; do sleep 2; done
  kill $! && wait $! || true
}
make_shards first 1 8 &
make_shards second 2 5 &
wait

mkdir -p "$work/drafter/training/data"
number=0
for file in "$work"/{first,second}/training/data/0*.safetensors; do
  target=$(printf '%s/drafter/training/data/%05d.safetensors' "$work" $number)
  [ -f "$target" ] || ln "$file" "$target"
  number=$((number + 1))
done
batchspec train-drafter --out "$work/drafter" --seed 1 --tokens 690000 --minutes 207 --data-minutes 200 \
  --num-measurements 12 "${common[@]}"
