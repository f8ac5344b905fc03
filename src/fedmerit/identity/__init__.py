"""Who is who: names that members may have, keys and the roster, one encoding of what is signed or hashed."""
