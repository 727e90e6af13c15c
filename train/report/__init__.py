"""From the numbers of measured acceptance to what a person reads: recovery of the gap, Markdown, HTML, pictures."""
