"""The ways to ask for text: an OpenAI-compatible endpoint, a terminal, transformers' conventions."""
