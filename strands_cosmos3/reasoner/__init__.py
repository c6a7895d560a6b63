"""Answers in words about pictures and films: the half of Cosmos 3 that reads and writes text.

::

    loading.py    transformers' model with the weights of a checkpoint, or of an engine's text tower
    pixels.py     pictures and films as the patches that the vision encoder reads
    prompts.py    a question with pictures and films as the model's inputs
    forms.py      answers that follow a JSON schema
    reasoner.py   Reasoner: ask a question

``from strands_cosmos3.reasoner.reasoner import Reasoner``, or ``strands_cosmos3.Reasoner``.
"""
