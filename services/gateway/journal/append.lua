-- KEYS: the stream, the tenant's index. ARGV: ms to keep, streams that a tenant may have, name in the index, head or '',
-- then the pieces. Answers 1; 0 where the stream is not there and no head came; -1 where the tenant has too many.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local keep, head = tonumber(ARGV[1]), ARGV[4]
if head ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[2]) then return -1 end
  redis.call('DEL', KEYS[1])
  redis.call('XADD', KEYS[1], '*', 'h', head)
elseif redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
for index = 5, #ARGV do redis.call('XADD', KEYS[1], '*', 'p', ARGV[index]) end
redis.call('PEXPIRE', KEYS[1], keep)
redis.call('ZADD', KEYS[2], now + keep, ARGV[3])
redis.call('PEXPIRE', KEYS[2], keep)
return 1
