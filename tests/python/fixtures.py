"""Lays small model repositories: ONNX models of a few hundred bytes, and models of the identity backend.

    .venv/bin/python tests/python/fixtures.py DIRECTORY

Every model is made here, seeded where it has weights, so that a repository is a function of this file.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# Datatype on the wire -> type in ONNX. A model `id_TYPE` copies a vector, `idb_TYPE` a batch of vectors.
TYPES = {
    "bool": TensorProto.BOOL,
    "uint8": TensorProto.UINT8,
    "uint16": TensorProto.UINT16,
    "uint32": TensorProto.UINT32,
    "uint64": TensorProto.UINT64,
    "int8": TensorProto.INT8,
    "int16": TensorProto.INT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "fp32": TensorProto.FLOAT,
    "fp64": TensorProto.DOUBLE,
    "str": TensorProto.STRING,
}

Value = tuple[str, int, list]


def save(
    repository: Path,
    name: str,
    nodes: list,
    inputs: list[Value],
    outputs: list[Value],
    *,
    weights: dict[str, np.ndarray] | None = None,
    version: str = "1",
    file: str = "model.onnx",
) -> Path:
    """Writes one ONNX model and returns its folder."""
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, key) for key, array in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)])
    model.ir_version = 8
    onnx.checker.check_model(model)
    folder = repository / name
    (folder / version).mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / version / file)
    return folder


def copy(
    repository: Path, name: str, data_type: int, shape: list, *, batching: bool = False, **arguments: str
) -> Path:
    """A model whose output Y is its input X. Unless it is `batching`, an open first dimension is a plain one."""
    nodes = [helper.make_node("Identity", ["X"], ["Y"])]
    folder = save(repository, name, nodes, [("X", data_type, shape)], [("Y", data_type, shape)], **arguments)
    if not batching and shape and isinstance(shape[0], str):
        configure(folder, whole_shapes(inputs={"X": (data_type, shape)}, outputs={"Y": (data_type, shape)}))
    return folder


def configure(folder: Path, text: str) -> None:
    (folder / "config.pbtxt").write_text(text)


def whole_shapes(*, inputs: dict[str, tuple], outputs: dict[str, tuple]) -> str:
    """A configuration that names every dimension, so that completion takes none of them for the batch."""
    names = {number: "STRING" if name == "str" else name.upper() for name, number in TYPES.items()}

    def tensor(kind: str, name: str, data_type: int, shape: list) -> str:
        dims = ", ".join("-1" if isinstance(dim, str) else str(dim) for dim in shape)
        return f'{kind} [ {{ name: "{name}" data_type: TYPE_{names[data_type]} dims: [ {dims} ] }} ]\n'

    lines = [tensor("input", name, *value) for name, value in inputs.items()]
    lines += [tensor("output", name, *value) for name, value in outputs.items()]
    return 'backend: "onnxruntime"\nmax_batch_size: 0\n' + "".join(lines)


def echo(repository: Path, name: str, data_type: str, *, batch: int = 0, dims: str = "[ -1 ]", more: str = "") -> Path:
    """A model of the identity backend: OUTPUT0 is INPUT0."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    configure(
        folder,
        f'backend: "identity"\nmax_batch_size: {batch}\n'
        f'input [ {{ name: "INPUT0" data_type: TYPE_{data_type} dims: {dims} }} ]\n'
        f'output [ {{ name: "OUTPUT0" data_type: TYPE_{data_type} dims: {dims} }} ]\n{more}',
    )
    return folder


def repeat(repository: Path, name: str = "repeat") -> Path:
    """A model of the repeat backend, which sends the elements of IN one by one, each after its DELAY if there is one."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    configure(
        folder,
        'backend: "repeat"\nmax_batch_size: 0\nmodel_transaction_policy { decoupled: true }\n'
        'input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, '
        '{ name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] optional: true } ]\n'
        'output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]\n',
    )
    return folder


def mlp(repository: Path, name: str = "mlp", *, config: str | None = None) -> Path:
    """FP32[batch, 64] through two hidden layers of 512 and 480 to FP32[batch, 32]: 0.3 million parameters."""
    random = np.random.default_rng(7)
    widths = [64, 512, 480, 32]
    weights, nodes, last = {}, [], "X"
    for layer, (before, after) in enumerate(zip(widths, widths[1:])):
        weights[f"W{layer}"] = (random.standard_normal((before, after)) / np.sqrt(before)).astype(np.float32)
        weights[f"B{layer}"] = random.standard_normal(after).astype(np.float32) * np.float32(0.1)
        result = "Y" if after == widths[-1] else f"H{layer}"
        gemm = result if result == "Y" else f"G{layer}"
        nodes.append(helper.make_node("Gemm", [last, f"W{layer}", f"B{layer}"], [gemm]))
        if result != "Y":
            nodes.append(helper.make_node("Relu", [gemm], [result]))
        last = result
    tensor = TensorProto.FLOAT
    folder = save(repository, name, nodes, [("X", tensor, ["N", 64])], [("Y", tensor, ["N", 32])], weights=weights)
    if config is not None:
        configure(folder, config)
    return folder


def lay_types(repository: Path) -> None:
    """id_TYPE (no batching, one dynamic dimension) and idb_TYPE (batches of at most 8) for every type."""
    for name, data_type in TYPES.items():
        copy(repository, f"id_{name}", data_type, ["a"])
        folder = copy(repository, f"idb_{name}", data_type, ["N", "a"], batching=True)
        configure(folder, 'backend: "onnxruntime"\nmax_batch_size: 8\n')


def lay_shapes(repository: Path) -> None:
    """Scalars, a lone batch dimension, a fixed leading 1, two and three dynamic dimensions."""
    tensor = TensorProto.FLOAT
    copy(repository, "id_scalar", tensor, [])
    copy(repository, "idb_rank1", tensor, ["N"], batching=True)
    copy(repository, "id_fixed1", tensor, [1, 4])
    copy(repository, "id_2d", tensor, ["a", "b"])
    copy(repository, "id_3d", tensor, ["a", "b", "c"])


def lay_sums(repository: Path) -> None:
    """Two inputs and two outputs, and a division that makes NaN and infinity."""
    tensor = TensorProto.FLOAT
    nodes = [helper.make_node("Add", ["A", "B"], ["SUM"]), helper.make_node("Sub", ["A", "B"], ["DIFF"])]
    both = ["N", 4]
    folder = save(
        repository,
        "addsub",
        nodes,
        [("A", tensor, both), ("B", tensor, both)],
        [("SUM", tensor, both), ("DIFF", tensor, both)],
    )
    configure(folder, 'backend: "onnxruntime"\nmax_batch_size: 8\n')
    nodes = [helper.make_node("Div", ["A", "B"], ["Y"])]
    folder = save(repository, "divide", nodes, [("A", tensor, ["n"]), ("B", tensor, ["n"])], [("Y", tensor, ["n"])])
    vector = (tensor, ["n"])
    configure(folder, whole_shapes(inputs={"A": vector, "B": vector}, outputs={"Y": vector}))


def lay_classes(repository: Path) -> None:
    """Labels with CRLF, without a final line end and fewer than classes; a two-dimensional output; strings."""
    tensor = TensorProto.FLOAT
    folder = copy(repository, "classes", tensor, ["N", "a"])
    configure(
        folder,
        'backend: "onnxruntime"\nmax_batch_size: 8\n'
        'input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
        'output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "labels.txt" } ]\n',
    )
    (folder / "labels.txt").write_bytes(b"apple\r\nbanana\r\ncherry")
    copy(repository, "classes_2d", tensor, ["N", "a", "b"])


def lay_names(repository: Path) -> None:
    """Model names that a URL must encode."""
    for name in NAMES:
        echo(repository, name, "FP32")


NAMES = ["my model", "模型", "a+b", "a.b-c_d"]


def lay_versions(repository: Path) -> None:
    """Three versions of one model, all served."""
    folder = echo(repository, "versions", "INT32", more="version_policy: { all { } }\n")
    for version in ("3", "10"):
        (folder / version).mkdir()


def lay(repository: Path) -> None:
    """Everything most tests need."""
    repository.mkdir(parents=True, exist_ok=True)
    lay_types(repository)
    lay_shapes(repository)
    lay_sums(repository)
    lay_classes(repository)
    lay_names(repository)
    lay_versions(repository)
    mlp(repository)
    for data_type in ("BF16", "FP16", "FP32", "STRING"):
        echo(repository, f"echo_{data_type.lower()}", data_type)
    echo(
        repository,
        "sleepy",
        "FP32",
        more='parameters { key: "execute_delay_ms" value: { string_value: "700" } }\n',
    )


if __name__ == "__main__":
    lay(Path(sys.argv[1]))
    print(len(list(Path(sys.argv[1]).iterdir())), "models laid in", sys.argv[1])
