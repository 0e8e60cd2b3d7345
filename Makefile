# Shortcuts; everything works without make too. See README.md and CONTRIBUTING.md.
export GOTOOLCHAIN := go1.27.3
export CGO_ENABLED := 0

.PHONY: build test ci fuzz

build:
	go build -o bin/ninfer ./cmd/ninfer

test:
	go test ./...

ci:
	bash .ci/run

# Every fuzz target for FUZZTIME each; hours by hand: make fuzz FUZZTIME=1h
FUZZTIME ?= 1m
fuzz:
	@for pkg in $$(go list ./...); do \
	  for f in $$(go test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
	    echo "== $$pkg $$f"; go test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) $$pkg || exit 1; \
	  done; \
	done
