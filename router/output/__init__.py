"""The assistant's output as events: text, reasoning and tool calls, read from generated text."""
