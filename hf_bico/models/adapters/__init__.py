"""PEFT adapters: read exactly or not at all, and written so that peft reads them back."""
