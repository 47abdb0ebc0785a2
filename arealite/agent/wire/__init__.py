"""Wire formats: what agents send and accept, as OpenAI's and Anthropic's packages do. No tokens, no engine."""
