"""How near in meaning are these sentences? Asks over gRPC for their embeddings and compares them.

    .venv/bin/python examples/clients/embed_grpc.py ["A sentence." ...] [--url localhost:8001]
"""

import argparse
from pathlib import Path

import prepare
import tritonclient.grpc as grpc

MODEL = Path(__file__).resolve().parents[1] / "repository" / "text_embedding"
SENTENCES = [
    "A galley with three banks of oars.",
    "An ancient warship rowed by many men.",
    "The price of tea rose again this week.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sentences", nargs="*", default=SENTENCES)
    parser.add_argument("--url", default="localhost:8001")
    arguments = parser.parse_args()

    # All sentences travel in one batch, padded to the longest; both dimensions are dynamic in the model.
    arrays = prepare.WordPieces(MODEL / "tokenizer.json").batch(arguments.sentences)
    inputs = []
    for name, array in arrays.items():
        tensor = grpc.InferInput(name, list(array.shape), "INT64")
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)

    with grpc.InferenceServerClient(arguments.url) as client:
        answer = client.infer("text_embedding", inputs)

    vectors = prepare.sentence_vectors(answer.as_numpy("last_hidden_state"), arrays["attention_mask"])
    for sentence, row in zip(arguments.sentences, vectors @ vectors.T):
        print("  ".join(f"{value:5.2f}" for value in row), " ", sentence)


if __name__ == "__main__":
    main()
