"""Write a model as GGUF and read it back dequantised."""

from pathlib import Path

import gguf
import numpy as np

from model import CONTEXT, RMS_EPSILON, ROPE_BASE, Shape
from tasks import BOS, EOS, FIRST_BYTE, UNK, VOCAB

FILE_TYPES = {
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}
LICENSE = "MIT OR Apache-2.0"


def vocabulary() -> tuple[list[str], list[gguf.TokenType]]:
    """unk, bos, eos, then one token per byte.

    llama.cpp turns each space of a text into U+2581 and looks that up as a normal token, so the
    space cannot be a byte token like the others.
    """
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256
    space = FIRST_BYTE + ord(" ")
    tokens[space], kinds[space] = "\u2581", gguf.TokenType.NORMAL
    return tokens, kinds


def write(path: Path, name: str, shape: Shape, weights: dict[str, np.ndarray], file_type: str):
    """Every matrix in the file's type, every norm in F32."""
    tensor_type, llama_type = FILE_TYPES[file_type]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_license(LICENSE)
    writer.add_file_type(llama_type)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_rope_dimension_count(shape.dim // shape.heads)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(RMS_EPSILON)
    writer.add_vocab_size(VOCAB)
    tokens, kinds = vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    for key, value in weights.items():
        if value.ndim == 1:
            writer.add_tensor(key, value)
        else:
            writer.add_tensor(key, gguf.quantize(value, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path: Path) -> tuple[Shape, dict[str, np.ndarray]]:
    """Shape and float32 weights of a file, as any other reader would see them."""
    reader = gguf.GGUFReader(path)

    def number(key):
        return reader.fields[f"llama.{key}"].contents()

    shape = Shape(
        dim=number("embedding_length"),
        layers=number("block_count"),
        heads=number("attention.head_count"),
        ff=number("feed_forward_length"),
    )
    weights = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    return shape, {key: np.asarray(value, np.float32) for key, value in weights.items()}
