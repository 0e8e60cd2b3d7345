#!/usr/bin/env bash
# build.sh FOLDER: the programs that check.sh and rows.sh want, for a machine that may have no Go. Without the model inside: its tests need no GPU.
set -euo pipefail
export GOTOOLCHAIN=go1.27.3 CGO_ENABLED=0
mkdir -p "$1"
to=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
flags=(-trimpath -ldflags '-s -w')
for p in kernels gemm chunk device; do go test -c "${flags[@]}" -o "$to/$p.test" ./internal/backend/cuda/$p; done
go test -c "${flags[@]}" -tags nonano -o "$to/cli.test" ./internal/cli
go build "${flags[@]}" -tags nonano -o "$to/ninfer" ./cmd/ninfer
{ git rev-parse HEAD; git status --porcelain | grep -v '^??' || true; } > "$to/commit"
