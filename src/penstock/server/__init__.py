"""The HTTP server: OpenAI's endpoints, llama.cpp's small ones, a page to chat on. Needs the extra `server`."""
