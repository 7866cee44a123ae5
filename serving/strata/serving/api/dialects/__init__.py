"""APIs beside OpenAI's completions and chat: their requests' checks, their errors, and the rules for continuing their streams."""
