# Shortcuts; everything works without make too. See README.md and CONTRIBUTING.md.
export GOTOOLCHAIN := go1.27.3
export CGO_ENABLED := 0

.PHONY: build test ci fuzz convert-speed convert-crash

build:
	go build -o bin/ninfer ./cmd/ninfer

test:
	go test ./...

ci:
	bash .ci/run

# Every fuzz target for FUZZTIME each; hours by hand: make fuzz FUZZTIME=1h. Targets of one package: make fuzz FUZZPKG=./internal/text/parse
# Without a limit of ten tries the first inputs are made smaller for a minute each, and hardly one is new.
FUZZTIME ?= 1m
FUZZPKG ?= ./...
fuzz:
	@for pkg in $$(go list $(FUZZPKG)); do \
	  for f in $$(go test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
	    echo "== $$pkg $$f"; go test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x $$pkg || exit 1; \
	  done; \
	done

# Conversions of generated checkpoints of 4 GiB on the disk of WORK (needs 15 GB): speed beside plain reading and writing and each encoder's
# speed on one core; and 50 kills and 50 full disks (loop file systems: root on Linux), which take ten minutes to an hour.
WORK ?= /tmp
convert-speed:
	NINFER_CONVERT_SPEED=$(WORK) go test -count=1 -v -run 'TestSpeed' ./internal/convert
	go test -run '^$$' -bench BenchmarkEncoders ./internal/num
convert-crash:
	NINFER_CONVERT_CRASH=$(WORK) go test -count=1 -v -timeout 3h -run 'TestCrash' ./internal/convert
