"""Models without reasoning and tool calls: the text is the content."""

from penstock.text.formats.base import ChatFormat

PLAIN = ChatFormat("plain")
