-- The name is an identifier, and cannot be a parameter.
CREATE DATABASE {name}
