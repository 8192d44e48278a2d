"""Writes tests/data/: the pictures and texts the tests send, and what bare onnxruntime answers to them.

Run by hand after a change of the example models (`make test-data`); the results are committed. The
expected answers come from onnxruntime in this process, never from the server under test.
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageFont

import wheels

sys.path.insert(0, str(wheels.ROOT / "examples" / "clients"))
import prepare  # noqa: E402

DATA = wheels.ROOT / "tests" / "data"
REPOSITORY = wheels.ROOT / "examples" / "repository"

SENTENCES = [
    "A galley with three banks of oars.",
    "An ancient warship rowed by many men.",
    "The price of tea rose again this week.",
]
PROGRAM = b"""import sys

def main(arguments):
    for name in arguments:
        with open(name, encoding="utf-8") as file:
            print(name, sum(1 for line in file))

if __name__ == "__main__":
    main(sys.argv[1:])
"""


def draw_page() -> Image.Image:
    """A page of text as it comes from a scanner, upright."""
    page = Image.new("L", (620, 800), 250)
    pen = ImageDraw.Draw(page)
    pen.text((60, 50), "On the trireme", font=ImageFont.load_default(40), fill=20)
    words = (
        "The trireme was a warship with three rows of oars on each side, one man to an oar. It was fast and "
        "nimble and the master of the inner sea for two hundred years. Its crew counted one hundred and seventy "
        "rowers, a few sailors and a handful of soldiers; the ram at its bow was its weapon. At night it was "
        "drawn up on the beach, for it had no room to sleep and none to cook. "
    ).split() * 4
    line, y = "", 130
    for word in words:
        if len(line) + len(word) > 54:
            pen.text((60, y), line, font=ImageFont.load_default(18), fill=30)
            line, y = "", y + 27
            if y > 740:
                break
        line += word + " "
    return page


def session(model: str) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(REPOSITORY / model / "1" / "model.onnx", providers=["CPUExecutionProvider"])


def top(scores: np.ndarray, labels: list[str], count: int) -> list[dict]:
    order = np.argsort(-scores, kind="stable")[:count]
    return [{"index": int(i), "label": labels[i], "score": float(scores[i])} for i in order]


def labels(model: str) -> list[str]:
    return (REPOSITORY / model / "labels.txt").read_text().split("\n")[:-1]


def main() -> None:
    DATA.mkdir(exist_ok=True)
    page = draw_page()
    expected = {}

    page.quantize(16).save(DATA / "page.png", optimize=True)
    page = Image.open(DATA / "page.png")
    model, names = session("orientation"), labels("orientation")
    expected["orientation"] = []
    # The class is by how many degrees the page must be turned clockwise to have come from upright; Pillow
    # turns the other way.
    for turned in (0, 90, 180, 270):
        tensor = prepare.page(page.rotate(-turned, expand=True))
        scores = model.run(None, {"x": tensor[np.newaxis]})[0][0]
        expected["orientation"].append({"turned_clockwise": turned, "top": top(scores, names, 3)})

    (DATA / "program.txt").write_bytes(PROGRAM)
    scores = session("file_type").run(None, {"bytes": prepare.file_bytes(PROGRAM)[np.newaxis]})[0][0]
    expected["file_type"] = {"file": "program.txt", "top": top(scores, labels("file_type"), 3)}

    inputs = prepare.WordPieces(REPOSITORY / "text_embedding" / "tokenizer.json").batch(SENTENCES)
    hidden = session("text_embedding").run(None, inputs)[0]
    vectors = prepare.sentence_vectors(hidden, inputs["attention_mask"])
    expected["text_embedding"] = {
        "sentences": SENTENCES,
        "input_ids": inputs["input_ids"].tolist(),
        "first_components": vectors[:, :8].astype(float).round(6).tolist(),
        "similarity": (vectors @ vectors.T).astype(float).round(6).tolist(),
    }

    model, state, speech = session("voice_activity"), np.zeros((2, 1, 128), np.float32), []
    sound = prepare.tone(576 * 4).reshape(4, 1, 576)
    for chunk in sound:
        probability, state = model.run(None, {"input": chunk, "state": state, "sr": np.array(16000, np.int64)})
        speech.append(float(probability[0, 0]))
    expected["voice_activity"] = {"chunks_of_576": speech, "state_mean": float(state.mean())}

    tensor = np.asarray(page.convert("RGB").resize((320, 416)), np.float32).transpose(2, 0, 1)[np.newaxis]
    heat = session("text_detection").run(None, {"x": tensor / 127.5 - 1})[0]
    expected["text_detection"] = {"size": [320, 416], "shape": list(heat.shape), "mean": float(heat.mean())}

    title = (50, 44, 350, 104)
    line = page.convert("RGB").crop(title).resize((192, 48))
    turned = [line, line.rotate(180)]
    tensor = np.stack([np.asarray(part, np.float32).transpose(2, 0, 1) / 127.5 - 1 for part in turned])
    scores = session("text_direction").run(None, {"x": tensor})[0]
    expected["text_direction"] = {"crop": title, "size": [192, 48], "top": [top(row, ["0", "180"], 2) for row in scores]}

    (DATA / "examples.json").write_text(json.dumps(expected, indent=1) + "\n")
    request = {
        "inputs": [
            {
                "name": "bytes",
                "datatype": "INT32",
                "shape": [1, 2048],
                "data": prepare.file_bytes(PROGRAM).tolist(),
            }
        ],
        "outputs": [{"name": "target_label", "parameters": {"classification": 3}}],
    }
    requests = wheels.ROOT / "examples" / "requests"
    requests.mkdir(exist_ok=True)
    (requests / "file_type.json").write_text(json.dumps(request, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
