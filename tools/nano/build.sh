#!/usr/bin/env bash
# Makes the artifact that is compiled into the program from the checkpoint in testdata/nano. The bytes depend on nothing but the checkpoint
# and the converter; a test of internal/nano compares them.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=qwen3_8_flash_next_125b_a6b_nvfp4.ninfer
out=internal/nano/model
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
go build -tags nonano -o "$dir/ninfer" ./cmd/ninfer
"$dir/ninfer" convert --quiet --model testdata/nano/checkpoint --out "$dir/$name"
"$dir/ninfer" verify "$dir/$name" >"$dir/verify.json"
size=$(wc -c <"$dir/$name")
[ "$size" -le 24000000 ] || { echo "the artifact has $size bytes, at most 24000000 go into the program"; exit 1; }
"$dir/ninfer" selftest "$dir/$name" --golden "$out/golden"
mv "$dir/$name" "$out/$name"
echo "$out/$name: $size bytes"
