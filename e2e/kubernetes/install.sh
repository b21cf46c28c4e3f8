#!/usr/bin/env bash
# Builds the programs of a control plane from the modules in programs/go.mod.
#
#   install.sh FOLDER
#
# It takes ten minutes where the compiler's cache knows none of them, and does
# nothing where FOLDER has them already.
set -euo pipefail
folder=$1
cd "$(dirname "$0")/programs"
mkdir -p "$folder"
exec 9> "$folder/lock"
flock 9
made=$(cat go.mod go.sum ../install.sh | sha256sum)
[ "$(cat "$folder/ready" 2>/dev/null)" != "$made" ] || exit 0

version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
minor=${version#v1.}
release=k8s.io/component-base/version
flags="-s -w -X $release.gitVersion=$version -X $release.gitMajor=1 -X $release.gitMinor=${minor%%.*}"
export CGO_ENABLED=0
for package in $(go list tool); do
  case $package in
    go.etcd.io/etcd/server/v3) name=etcd ;;
    *) name=${package##*/} ;;
  esac
  echo "$(date -u +%H:%M:%S) building $name for the control plane of Kubernetes $version into $folder"
  go build -trimpath -ldflags "$flags" -o "$folder/$name.part" "$package"
  mv "$folder/$name.part" "$folder/$name"
done
kwok=$(go list -m -f '{{.Dir}}' sigs.k8s.io/kwok)/kustomize/stage
for stage in node/fast/node-initialize pod/fast/pod-ready pod/fast/pod-delete pod/fast/pod-complete; do
  cat "$kwok/$stage.yaml"
  echo ---
done > "$folder/stages.yaml"
echo "$made" > "$folder/ready"
