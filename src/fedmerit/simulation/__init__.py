"""A federation on one machine, with torch: config -> data dealt to members -> rounds -> scores."""
