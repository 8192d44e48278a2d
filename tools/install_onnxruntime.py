"""Lays the ONNX Runtime library into .trireme/onnxruntime/, out of its Python wheel. No root needed.

The library depends on no Python: the wheel is only the parcel in which it is published for Linux.
"""

import platform
import shutil
import sys

import wheels

VERSION = "1.32.0"
LIBRARY = f"libonnxruntime.so.{VERSION}"


def main() -> None:
    target = wheels.HOME / "onnxruntime"
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        sys.exit(
            f"install_onnxruntime: expected Linux on x86_64 or aarch64, found {sys.platform} on {machine}. "
            f"Install ONNX Runtime {VERSION} or newer yourself and name its path in the "
            f"environment variable TRIREME_ONNXRUNTIME."
        )
    # Any Python's wheel holds the same library; one is named so that it does not depend on ours.
    packages = wheels.download(
        wheels.TOOLS / "requirements-onnxruntime.txt",
        wheels.HOME / "wheels" / "onnxruntime",
        "--python-version=3.12",
        "--implementation=cp",
        "--abi=cp312",
        f"--platform=manylinux_2_28_{machine}",
    )
    wheels.extract(packages, "onnxruntime", f"onnxruntime/capi/{LIBRARY}", target / LIBRARY)
    for notice in ("LICENSE", "ThirdPartyNotices.txt"):
        wheels.extract(packages, "onnxruntime", f"onnxruntime/{notice}", target / notice)
    link = target / "libonnxruntime.so"
    link.unlink(missing_ok=True)
    link.symlink_to(LIBRARY)
    shutil.rmtree(wheels.HOME / "wheels" / "onnxruntime")
    print(f"ONNX Runtime {VERSION} laid in {target.relative_to(wheels.ROOT)}")


if __name__ == "__main__":
    main()
