"""Who asks: an OpenAI-compatible endpoint, a terminal, transformers' conventions."""
