"""The OpenAI API: from HTTP requests to generations, and from their text back to responses."""
