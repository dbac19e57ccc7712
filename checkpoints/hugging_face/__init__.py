"""Find, read, check and write Hugging Face (HF) folders."""
