"""From engine requests to text: admission, sequences and their retries, and the channel that tokens come by."""
