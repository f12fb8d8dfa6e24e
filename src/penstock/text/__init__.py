"""Text on its way in and out: tokenizers, chat templates, stop strings, grammars, the formats of chats."""
