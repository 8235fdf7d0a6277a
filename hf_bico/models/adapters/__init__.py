"""PEFT adapters: read as changes of weights, exactly or not at all, and written so that peft reads them back."""
