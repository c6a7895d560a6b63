#!/usr/bin/env bash
# transformers 5 writes the marks of vision around a film twice in Qwen3-VL prompts.
#
# The chat template of Qwen3-VL writes <|vision_start|><|video_pad|><|vision_end|> for a film. The
# processor puts marks of its own around the frames of each time stamp. In transformers 4.57.1 its
# __call__ (models/qwen3_vl/processing_qwen3_vl.py) replaces the template's marks together with the
# film's token; in 5.23.0 get_text_with_replacements replaces the token alone, so that the prompt
# keeps one more pair of marks. The replacement below has the form that the processor makes.
#
# It matters to whoever asks Cosmos 3 Nano's reasoner, which uses this processor, about a film: the
# prompt has two tokens more than that of 4.57.1, and no error says so. What it does to answers was
# not measured. The script exits with 1 if the outer marks are gone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --disable-pip-version-check transformers==5.23.0 2>&1 | grep -v WARNING || true
"$folder/env/bin/python" - <<'PY'
import transformers
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

print("transformers", transformers.__version__)


class Processor(Qwen3VLProcessor):
    def __init__(self):  # the replacement of text needs no tokenizer
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.vision_start_token, self.vision_end_token = "<|vision_start|>", "<|vision_end|>"


prompt = "<|vision_start|><|video_pad|><|vision_end|>"
frames = "<0.2 seconds><|vision_start|><|video_pad|><|vision_end|>"
text = Processor().get_text_with_replacements([prompt], videos_replacements=[frames])
text = text[0] if isinstance(text, tuple) else text
text = text[0] if isinstance(text, list) else text
print("film in the prompt:", text)
outer = text.startswith("<|vision_start|><0.2") and text.endswith("<|vision_end|><|vision_end|>")
print("outer marks are kept:", outer)
raise SystemExit(0 if outer else 1)
PY
