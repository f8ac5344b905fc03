"""A federation on one machine, trained with torch: config -> data dealt to members -> rounds -> scores."""
