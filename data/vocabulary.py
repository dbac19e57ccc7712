"""Check that ids fit a model's vocabulary."""

from ..parallel_state import BadInput


def check_vocabulary(vocab_size: int, model_vocab_size: int, where: object) -> None:
    """Refuse a tokenizer or tokens with ids that the model has no rows for. A smaller vocabulary is fine."""
    if vocab_size > model_vocab_size:
        raise BadInput(
            where,
            "vocab_size",
            expected=f"at most {model_vocab_size}, the model's",
            found=vocab_size,
            todo="Raise the model's vocab_size or use the model's own tokenizer",
        )
