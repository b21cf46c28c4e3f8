#!/bin/sh
# Runs the whole of `make test` beside a busy loop on every core: stress.sh TIMES.
# Nothing is taken from the test cache. The log of each run goes to
# out/stress/N.log; the first run that fails ends it and shows what failed.
set -eu
times=$1
cd "$(dirname "$0")/.."
mkdir -p out/stress
loops=
trap 'kill $loops' EXIT
trap 'exit 1' INT TERM
for _ in $(seq "$(nproc)"); do
	(while :; do :; done) &
	loops="$loops $!"
done
for n in $(seq "$times"); do
	began=$(date +%s)
	if ! GOFLAGS="${GOFLAGS:-} -count=1" make --no-print-directory test >"out/stress/$n.log" 2>&1; then
		grep -E '^(--- FAIL|FAIL|panic|WARNING: DATA RACE)|_test.go:[0-9]+:' "out/stress/$n.log" | head -50
		echo "run $n of $times FAILED after $(($(date +%s) - began)) s: out/stress/$n.log"
		exit 1
	fi
	echo "run $n of $times passed in $(($(date +%s) - began)) s"
done
