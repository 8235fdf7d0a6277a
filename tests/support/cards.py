"""Model cards as tools write them."""

from __future__ import annotations

TRAINER_CARD = """---
library_name: transformers
license: apache-2.0
base_model: openai/clip-vit-base-patch32
tags:
- generated_from_trainer
datasets:
- imagefolder
metrics:
- accuracy
model-index:
- name: clip-eurosat
  results:
  - task:
      name: Image Classification
      type: image-classification
    dataset:
      name: imagefolder
      type: imagefolder
      config: default
      split: train
      args: default
    metrics:
    - name: Accuracy
      type: accuracy
      value: 0.9814814814814815
---

<!-- This model card has been generated automatically according to the information the Trainer had access to. You
should probably proofread and complete it, then remove this comment. -->

# clip-eurosat
"""


PEFT_CARD = """---
base_model: unsloth/llama-3-8b-bnb-4bit
library_name: peft
---

# Model Card for Model ID

<!-- Provide a quick summary of what the model is/does. -->
"""
