"""Where is speech in this sound? Feeds a 16 kHz WAV file chunk by chunk; the model's memory travels along.

    .venv/bin/python examples/clients/listen_http.py [SOUND.wav] [--url localhost:8000]
"""

import argparse
import wave

import numpy as np
import prepare
import tritonclient.http as http

CHUNK, CONTEXT = 512, 64  # samples: what is new in each request, and what is repeated of the one before


def samples(path: str | None) -> np.ndarray:
    if path is None:
        return prepare.tone(16000)
    with wave.open(path) as sound:
        if (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) != (16000, 1, 2):
            raise SystemExit("expected a WAV file with one channel of 16-bit samples at 16 kHz")
        return np.frombuffer(sound.readframes(sound.getnframes()), np.int16).astype(np.float32) / 32768


def tensor(name: str, array: np.ndarray, datatype: str) -> http.InferInput:
    made = http.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sound", nargs="?")
    parser.add_argument("--url", default="localhost:8000")
    arguments = parser.parse_args()

    sound = samples(arguments.sound)
    state = np.zeros((2, 1, 128), np.float32)
    context = np.zeros(CONTEXT, np.float32)
    rate = np.array([16000], np.int64)  # the model wants a scalar: over the wire that is a shape of [1]
    with http.InferenceServerClient(arguments.url) as client:
        for start in range(0, len(sound) - CHUNK + 1, CHUNK):
            chunk = np.concatenate([context, sound[start : start + CHUNK]])
            inputs = [tensor("input", chunk[None], "FP32"), tensor("state", state, "FP32"), tensor("sr", rate, "INT64")]
            answer = client.infer("voice_activity", inputs)
            state, context = answer.as_numpy("stateN"), chunk[-CONTEXT:]
            probability = float(answer.as_numpy("output")[0, 0])
            print(f"{start / 16000:6.2f} s  {probability:.3f}  {'#' * round(40 * probability)}")


if __name__ == "__main__":
    main()
