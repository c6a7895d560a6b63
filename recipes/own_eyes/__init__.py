"""Eyes for the bundled checkpoint: a vision encoder and a head that answer four questions about our
table, while the policy's weights stay as they are.

::

    pictures.py    pictures of posed tables, and first and last pictures of episodes, with answers
    questions.py   the questions, and the words of their answers
    folder.py      the checkpoint's folder with eyes, as transformers reads it
    train.py       python -m recipes.own_eyes.train
    figures.py     python -m recipes.own_eyes.figures

``NOTES.md`` has the commands, the figures, and what stood in the way.
"""
