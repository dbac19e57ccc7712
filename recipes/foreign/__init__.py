"""Translate the configurations of other trainers (DeepSpeed, Trainer, Accelerate, FSDP) into recipes."""
