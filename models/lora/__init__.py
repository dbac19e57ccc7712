"""Add LoRA to any family: PEFT's config, the layers that it names, and the family with adapters."""
