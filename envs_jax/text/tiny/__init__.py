"""The small tokenizer that ships with the package: `tokenizer.json` and `chat_template.jinja`, made by `build.py`."""
