"""Which way is this page turned? Asks over HTTP for the three likeliest answers, with their labels.

    .venv/bin/python examples/clients/classify_http.py [PICTURE] [--url localhost:8000]
"""

import argparse
from pathlib import Path

import prepare
import tritonclient.http as http
from PIL import Image

PAGE = Path(__file__).resolve().parents[2] / "tests" / "data" / "page.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", nargs="?", default=PAGE)
    parser.add_argument("--url", default="localhost:8000")
    arguments = parser.parse_args()

    picture = Image.open(arguments.picture)
    batch = prepare.page(picture)[None]  # the model takes batches: FP32[1, 3, 224, 224]

    with http.InferenceServerClient(arguments.url) as client:
        tensor = http.InferInput("x", list(batch.shape), "FP32")
        tensor.set_data_from_numpy(batch)
        # `class_count` turns the scores into the best classes: "score:index:label", sorted by score.
        scores = http.InferRequestedOutput("fetch_name_0", class_count=3)
        answer = client.infer("orientation", [tensor], outputs=[scores])

    for entry in answer.as_numpy("fetch_name_0")[0]:
        score, _, label = entry.decode().split(":")
        print(f"turned by {label:>3} degrees: {float(score):.3f}")


if __name__ == "__main__":
    main()
