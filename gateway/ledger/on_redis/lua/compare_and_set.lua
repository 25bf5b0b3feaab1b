-- key, '1' and the old value or '0' and '', the new value
local known = redis.call('HGET', key('notes'), ARGV[2])
if ARGV[3] == '0' and known or ARGV[3] == '1' and known ~= ARGV[4] then return {'ok', 0} end
redis.call('HSET', key('notes'), ARGV[2], ARGV[5])
changed = true
return finish({'ok', 1})
