#!/bin/bash
# The demonstration: real keys and values through every preset, then one chunk of a long synthetic
# context. Usage: tools/demo.sh KVTILE CONTEXT, from the top of the source tree. Prints two tables;
# the numbers are those of kvtile's own JSON reports.
set -euo pipefail
export LC_ALL=C

kvtile=$1
context=$2
sample=examples/data/smollm2-135m.safetensors
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# field FILE KEY: the value of a number or string in a flat JSON object.
field() { sed -nE 's/.*"'"$2"'": *"?([^",}]*)"?.*/\1/p' "$1" | head -n 1; }
mib() { awk -v b="$1" 'BEGIN { printf "%.2f", b / 1048576 }'; }

echo "1. $(basename "$sample"): chunked prefill over the packed cache, against float64"
printf '\n%-8s %10s %10s %7s %9s %9s %11s %11s\n' \
  preset cache dense ratio ns/qtl GFLOP/s kernel.err preset.err
for preset in k8v4 4bit_nc k3v4_nc 3bit_nc; do
  report=$scratch/$preset.json
  "$kvtile" prefill --input "$sample" --preset "$preset" --json "$report" >"$scratch/log" 2>&1 ||
    { cat "$scratch/log"; exit 1; }
  cache=$(field "$report" cache_bytes) dense=$(field "$report" dense_cache_bytes)
  printf '%-8s %6.2f MiB %6.2f MiB %6.2fx %9.1f %9.1f %11.1e %11.1e\n' "$preset" "$(mib "$cache")" \
    "$(mib "$dense")" "$(awk -v a="$dense" -v b="$cache" 'BEGIN { print a / b }')" \
    "$(field "$report" ns_per_query_token_layer)" "$(field "$report" gflops)" \
    "$(field "$report" rel_error)" "$(field "$report" preset_rel_error)"
done
cat <<'TEXT'

cache       packed bytes, against 16-bit keys and values (dense)
ns/qtl      nanoseconds per query token, cached token and layer
kernel.err  relative error of sampled rows against float64 attention over the same packed bytes
preset.err  relative error of the same rows against float64 attention over the raw keys and values
TEXT

echo
echo "2. one 16-token chunk behind $context packed tokens (24 query heads, 4 KV heads, head_dim 256)"
echo
report=$scratch/long.json
"$kvtile" prefill --synthetic --num-heads 24 --num-kv-heads 4 --head-dim 256 --context "$context" \
  --chunk 16 --last-chunk --preset 4bit_nc --json "$report" >"$scratch/log" 2>&1 ||
  { cat "$scratch/log"; exit 1; }
cache=$(field "$report" cache_bytes)
# The one-shot form decodes the whole past to 16-bit keys and values and joins them with the chunk's:
# two copies of both.
one_shot=$((2 * context * 4 * 256 * 2 * 2))
awk -v cache="$cache" -v one_shot="$one_shot" \
  -v workspace="$(field "$report" workspace_bytes)" -v rss="$(field "$report" peak_rss_bytes)" \
  -v ns="$(field "$report" ns_per_query_token_layer)" -v gflops="$(field "$report" gflops)" \
  -v error="$(field "$report" rel_error)" 'BEGIN {
  gib = 1073741824
  printf "packed cache          %8.2f GiB\n", cache / gib
  printf "one-shot buffers      %8.2f GiB  (16-bit keys and values, decoded and joined with the chunk)\n", one_shot / gib
  printf "kvtile workspace      %8.2f MiB  (%.0fx less)\n", workspace / 1048576, one_shot / workspace
  printf "peak resident memory  %8.2f GiB\n", rss / gib
  printf "time                  %8.0f ns per query token and cached token, %.1f GFLOP/s\n", ns, gflops
  printf "kernel error          %8.1e\n", error
}'
