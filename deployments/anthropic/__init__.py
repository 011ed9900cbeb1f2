"""Anthropic's Messages API: its requests as chats, and their output as its messages."""
