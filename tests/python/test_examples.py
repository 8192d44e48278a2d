"""The example models, against what bare onnxruntime answers to the same inputs (tests/data/examples.json)."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import prepare
import pytest
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http
import tritonclient.http.aio as http_aio
from PIL import Image
from server import ROOT

DATA = ROOT / "tests" / "data"
EXPECTED = json.loads((DATA / "examples.json").read_text())
TOLERANCE = 2e-3


def page(turned_clockwise: int) -> np.ndarray:
    return prepare.page(Image.open(DATA / "page.png").rotate(-turned_clockwise, expand=True))[np.newaxis]


def tensor(module, name: str, array: np.ndarray, datatype: str):
    made = module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def check_top(entries: np.ndarray, expected: list[dict]) -> None:
    """The first place has the right label and score; places whose scores are nearly equal may change order."""
    got = [entry.decode().split(":") for entry in entries]
    assert len(got) == len(expected)
    assert got[0][2] == expected[0]["label"] and int(got[0][1]) == expected[0]["index"]
    for (score, index, label), wanted in zip(got, expected):
        assert float(score) == pytest.approx(wanted["score"], abs=TOLERANCE)
        assert ORIENTATION[int(index)] == label


ORIENTATION = {0: "0", 1: "90", 2: "180", 3: "270"}


def check_orientation(result, case: dict) -> None:
    entries = result.as_numpy("fetch_name_0")
    assert entries.shape == (1, 3)
    check_top(entries[0], case["top"])


CASES = EXPECTED["orientation"]
turned = pytest.mark.parametrize("case", CASES, ids=[str(case["turned_clockwise"]) for case in CASES])


def ask_orientation(module, case: dict) -> tuple[list, list]:
    inputs = [tensor(module, "x", page(case["turned_clockwise"]), "FP32")]
    return inputs, [module.InferRequestedOutput("fetch_name_0", class_count=3)]


@turned
def test_orientation_http(examples, case):
    inputs, outputs = ask_orientation(http, case)
    with http.InferenceServerClient(examples.http) as client:
        check_orientation(client.infer("orientation", inputs, outputs=outputs), case)


@turned
def test_orientation_http_async(examples, case):
    inputs, outputs = ask_orientation(http, case)
    with http.InferenceServerClient(examples.http, concurrency=4) as client:
        handles = [client.async_infer("orientation", inputs, outputs=outputs) for _ in range(4)]
        for handle in handles:
            check_orientation(handle.get_result(), case)


def test_orientation_http_aio(examples):
    async def main():
        async with http_aio.InferenceServerClient(examples.http) as client:
            asked = [ask_orientation(http_aio, case) for case in CASES]
            answers = await asyncio.gather(*(client.infer("orientation", i, outputs=o) for i, o in asked))
            for answer, case in zip(answers, CASES):
                check_orientation(answer, case)

    asyncio.run(main())


@turned
def test_orientation_grpc(examples, case):
    inputs, outputs = ask_orientation(grpc, case)
    with grpc.InferenceServerClient(examples.grpc) as client:
        check_orientation(client.infer("orientation", inputs, outputs=outputs), case)


def test_orientation_grpc_callback_in_futures(examples):
    async def ask(client, case):
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def settle(result, error):
            future.set_exception(error) if error else future.set_result(result)

        inputs, outputs = ask_orientation(grpc, case)
        callback = lambda result, error: loop.call_soon_threadsafe(settle, result, error)  # noqa: E731
        client.async_infer("orientation", inputs, callback=callback, outputs=outputs)
        return await asyncio.wait_for(future, 60)

    async def main():
        with grpc.InferenceServerClient(examples.grpc) as client:
            answers = await asyncio.gather(*(ask(client, case) for case in CASES))
            for answer, case in zip(answers, CASES):
                check_orientation(answer, case)

    asyncio.run(main())


def test_orientation_grpc_aio(examples):
    async def main():
        async with grpc_aio.InferenceServerClient(examples.grpc) as client:
            for case in CASES:
                inputs, outputs = ask_orientation(grpc_aio, case)
                check_orientation(await client.infer("orientation", inputs, outputs=outputs), case)

    asyncio.run(main())


def test_orientation_in_one_batch(examples):
    batch = np.concatenate([page(case["turned_clockwise"]) for case in CASES])
    with grpc.InferenceServerClient(examples.grpc) as client:
        scores = client.infer("orientation", [tensor(grpc, "x", batch, "FP32")]).as_numpy("fetch_name_0")
    assert scores.shape == (4, 4)
    assert scores.argmax(axis=1).tolist() == [case["top"][0]["index"] for case in CASES]


def test_file_type(examples):
    content = (DATA / EXPECTED["file_type"]["file"]).read_bytes()
    inputs = [tensor(http, "bytes", prepare.file_bytes(content)[np.newaxis], "INT32")]
    outputs = [http.InferRequestedOutput("target_label", class_count=3)]
    with http.InferenceServerClient(examples.http) as client:
        entries = client.infer("file_type", inputs, outputs=outputs).as_numpy("target_label")
    score, index, label = entries[0][0].decode().split(":")
    expected = EXPECTED["file_type"]["top"][0]
    assert (int(index), label) == (expected["index"], expected["label"])
    assert float(score) == pytest.approx(expected["score"], abs=TOLERANCE)


def test_file_type_with_the_request_of_the_readme(examples):
    body = (ROOT / "examples" / "requests" / "file_type.json").read_bytes()
    status, answer = examples.request("POST", "/v2/models/file_type/infer", body)
    assert status == 200
    (output,) = json.loads(answer)["outputs"]
    assert output["shape"] == [1, 3] and output["data"][0].endswith(":143:python")


def test_text_embedding(examples):
    case = EXPECTED["text_embedding"]
    words = prepare.WordPieces(ROOT / "examples" / "repository" / "text_embedding" / "tokenizer.json")
    arrays = words.batch(case["sentences"])
    assert arrays["input_ids"].tolist() == case["input_ids"]
    inputs = [tensor(grpc, name, array, "INT64") for name, array in arrays.items()]
    with grpc.InferenceServerClient(examples.grpc) as client:
        hidden = client.infer("text_embedding", inputs).as_numpy("last_hidden_state")
    vectors = prepare.sentence_vectors(hidden, arrays["attention_mask"])
    # The kernels for int8 differ from processor to processor.
    np.testing.assert_allclose(vectors @ vectors.T, case["similarity"], atol=0.03)
    np.testing.assert_allclose(vectors[:, :8], case["first_components"], atol=0.03)


def test_text_embedding_takes_any_length(examples):
    with grpc.InferenceServerClient(examples.grpc) as client:
        for batch, sequence in ((1, 1), (2, 7), (1, 200)):
            ones = np.ones((batch, sequence), np.int64)
            names = ("input_ids", "attention_mask", "token_type_ids")
            inputs = [tensor(grpc, name, ones if name != "token_type_ids" else ones * 0, "INT64") for name in names]
            hidden = client.infer("text_embedding", inputs).as_numpy("last_hidden_state")
            assert hidden.shape == (batch, sequence, 384) and np.isfinite(hidden).all()


def test_voice_activity(examples):
    case = EXPECTED["voice_activity"]
    state, speech = np.zeros((2, 1, 128), np.float32), []
    rate = np.array([16000], np.int64)
    with http.InferenceServerClient(examples.http) as client:
        for chunk in prepare.tone(576 * 4).reshape(4, 1, 576):
            inputs = [tensor(http, "input", chunk, "FP32"), tensor(http, "state", state, "FP32")]
            result = client.infer("voice_activity", [*inputs, tensor(http, "sr", rate, "INT64")])
            state = result.as_numpy("stateN")
            speech.append(float(result.as_numpy("output")[0, 0]))
    assert speech == pytest.approx(case["chunks_of_576"], abs=TOLERANCE)
    assert float(state.mean()) == pytest.approx(case["state_mean"], abs=TOLERANCE)


def test_text_detection(examples):
    case = EXPECTED["text_detection"]
    picture = Image.open(DATA / "page.png").convert("RGB").resize(case["size"])
    batch = np.asarray(picture, np.float32).transpose(2, 0, 1)[np.newaxis] / 127.5 - 1
    with http.InferenceServerClient(examples.http) as client:
        heat = client.infer("text_detection", [tensor(http, "x", np.ascontiguousarray(batch), "FP32")]).as_numpy(
            "sigmoid_0.tmp_0"
        )
        assert list(heat.shape) == case["shape"]
        assert float(heat.mean()) == pytest.approx(case["mean"], abs=TOLERANCE)
        small = client.infer("text_detection", [tensor(http, "x", np.zeros((1, 3, 64, 96), np.float32), "FP32")])
        assert small.as_numpy("sigmoid_0.tmp_0").shape == (1, 1, 64, 96)


def test_text_direction(examples):
    case = EXPECTED["text_direction"]
    line = Image.open(DATA / "page.png").convert("RGB").crop(case["crop"]).resize(case["size"])
    parts = [np.asarray(part, np.float32).transpose(2, 0, 1) / 127.5 - 1 for part in (line, line.rotate(180))]
    output = "save_infer_model/scale_0.tmp_1"
    with http.InferenceServerClient(examples.http) as client:
        wanted = [http.InferRequestedOutput(output, class_count=1)]
        entries = client.infer("text_direction", [tensor(http, "x", np.stack(parts), "FP32")], outputs=wanted)
    labels = [row[0].decode().split(":")[2] for row in entries.as_numpy(output)]
    assert labels == [row[0]["label"] for row in case["top"]] == ["0", "180"]


@pytest.mark.parametrize(
    "script, arguments, says",
    [
        ("classify_http.py", ["--url={http}"], "turned by   0 degrees: 0.9"),
        ("embed_grpc.py", ["--url={grpc}"], "A galley with three banks of oars."),
        ("listen_http.py", ["--url={http}"], "0.96 s"),
        ("many_asyncio.py", ["--http={http}", "--grpc={grpc}"], "grpc, futures   prepare.py           0."),
    ],
)
def test_example_clients_run(examples, script, arguments, says):
    arguments = [argument.format(http=examples.http, grpc=examples.grpc) for argument in arguments]
    command = [sys.executable, str(ROOT / "examples" / "clients" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout, done.stdout
    if script == "many_asyncio.py":
        assert all(line.endswith(":143:python") for line in done.stdout.splitlines()), done.stdout
