"""Write the token files of this folder with the programs whose format they are: Megatron-Core and datatrove.

    python write.py             writes them anew (megatron-core 0.16.1, datatrove 0.10.1, transformers)
    python write.py PREFIX      reads PREFIX.bin and PREFIX.idx with Megatron-Core, and compares them

Neither program is needed for the tests. ``documents.jsonl`` and ``tokenizer/``, in which each byte is a token
and 256 the end of a document, say what the ids are.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
END = 256
TEXTS = [
    "Columns are cut.",
    "Rows too, and their sum is the product.",
    "ü",
    "A stage holds some of the blocks; what leaves one stage enters the next, and the gradient goes back.",
    "The seed and the data decide.",
    "Same weights, same losses, same checkpoint, in every layout.",
]
DOCUMENTS = [[*text.encode(), END] for text in TEXTS]


def write_tokenizer():
    # The byte-level alphabet in the order of the bytes, as in GPT-2: an id is a byte.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    vocabulary = {letters[byte]: byte for byte in range(256)} | {"<end>": END}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(HERE / "tokenizer")


def write_megatron(name, dtype, *, halves=False, pictures=False):
    """``halves``: two sequences and an empty document for each document, as with --split-sentences."""
    builder = IndexedDatasetBuilder(str(HERE / f"{name}.bin"), dtype=dtype, multimodal=pictures)
    for number, ids in enumerate(DOCUMENTS):
        lengths = [len(ids) // 2, len(ids) - len(ids) // 2] if halves else [len(ids)]
        builder.add_document(ids, lengths, [number % 2] * len(lengths) if pictures else None)
        if halves:
            builder.end_document()
    builder.finalize(str(HERE / f"{name}.idx"))


def write_datatrove(name, token_size):
    file = TokenizedFile(
        str(HERE), name, tokenizer_name_or_path="bytes", save_final_metadata=True, token_size=token_size
    )
    for ids in DOCUMENTS:
        file.write(ids, None)
    file.close()


def check(prefix):
    read = IndexedDataset(prefix)
    assert [read[n].tolist() for n in range(len(read))] == DOCUMENTS, prefix
    assert read.document_indices.tolist() == [*range(len(DOCUMENTS) + 1)], prefix
    print(f"{prefix}: {len(read)} documents, {read.index.dtype.__name__}, as they are in documents.jsonl")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        check(sys.argv[1])
        sys.exit()
    (HERE / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    write_tokenizer()
    write_megatron("int32", np.int32)
    write_megatron("uint16", np.uint16)
    write_megatron("int64", np.int64)
    write_megatron("sentences", np.int32, halves=True)
    write_megatron("pictures", np.int32, pictures=True)
    write_datatrove("00000_shuffled.ds", 2)
    write_datatrove("00001_shuffled.ds", 4)
    assert struct.calcsize("<9sQBQQ") == 34
