"""OpenAI API: turns HTTP requests into generations, and their text into responses."""
