"""What a model writes beside plain content: reasoning and tool calls, by model family."""
