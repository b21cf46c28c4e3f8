#!/bin/sh
# Runs the tests beside a busy loop on every core: stress.sh TIMES [PACKAGES]. All
# packages are tested if none are named, and the fuzz targets for 2 s each.
# Test binaries are built once, with the flags in RACE, into out/stress; the log of
# each package is in out/stress/ROUND. A failure ends nothing: at the end all are
# listed, with how often they failed.
set -eu
times=$1
shift
cd "$(dirname "$0")/.."
root=$PWD/out/stress
rm -rf "$root"
mkdir -p "$root/bin"
go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{.Dir}}{{end}}' "${@:-./...}" >"$root/packages"
while read -r package folder; do
	go test -c ${RACE:-} -o "$root/bin/$(echo "$package" | tr / -).test" "$package"
done <"$root/packages"
echo "$(wc -l <"$root/packages") packages are built"

loops=
trap 'kill $loops' EXIT
trap 'exit 1' INT TERM
for _ in $(seq "$(nproc)"); do
	(while :; do :; done) &
	loops="$loops $!"
done
failures() { grep -rhE '^(--- FAIL|FAIL|panic:|WARNING: DATA RACE)' "$@"; }
for n in $(seq "$times"); do
	began=$(date +%s)
	mkdir "$root/$n"
	# Each package says FAIL by itself, or its name follows where it could not.
	xargs -P "$(nproc)" -L 1 sh -c '
		name=$(echo "$2" | tr / -)
		cd "$3" && "$0/bin/$name.test" -test.timeout=1800s -test.paniconexit0 >"$0/$1/$name.log" 2>&1 || echo "FAIL $2" >>"$0/$1/$name.log"
	' "$root" "$n" <"$root/packages"
	test $# -gt 0 || e2e/fuzz.sh 2s "$root/fuzz" >"$root/$n/fuzz.log" 2>&1 || echo "FAIL fuzz" >>"$root/$n/fuzz.log"
	echo "round $n of $times: $(failures "$root/$n" | grep -c '^FAIL ') failed, $(($(date +%s) - began)) s"
done
if failures "$root"/[0-9]* >"$root/failures"; then
	sed -E 's/ \([0-9.]+s\)$//' "$root/failures" | grep -v '^FAIL$' | sort | uniq -c | sort -rn
	exit 1
fi
